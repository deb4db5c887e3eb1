"""Programs spread over devices by a partitioner that runs in a process of its own."""
