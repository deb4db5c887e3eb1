"""A stand-in with the surface of HESPAS that the plug-in touches; none of its code."""
