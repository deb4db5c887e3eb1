"""Tables of measured serving: predict and judge them, and learn from them."""
