"""What measured training steps teach: how far a step is from its operators and collectives alone.

``context`` says what a step has in common with others, ``effects`` holds the learned factors of
each level, ``fit`` learns them, and ``model`` adds intervals.
"""
