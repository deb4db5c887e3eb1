"""Feature tables of kernels, their graph view, and the roofline that features are relative to."""
