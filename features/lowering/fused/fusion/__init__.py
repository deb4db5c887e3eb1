"""Which operations become one kernel: priorities, epilogues, softmax, multi-output, horizontal."""
