"""What commands do when they join several folders: measuring, training, checking, the demo."""
