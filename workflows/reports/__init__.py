"""Reports over many predictions: accuracy, devices, clusters, operators, fidelities."""
