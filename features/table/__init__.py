"""Feature tables and graphs of kernels, and the roofline that features are relative to."""
