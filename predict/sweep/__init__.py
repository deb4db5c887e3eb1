"""Many plans on many clusters, resumable."""
