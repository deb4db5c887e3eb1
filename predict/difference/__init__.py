"""What a change of a program does to its time: kernels that both versions have cancel."""
