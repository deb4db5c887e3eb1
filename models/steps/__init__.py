"""What measured training steps teach: how far a step is from its operators and collectives alone.

``context`` says what a step has in common with others, ``effects`` learns the factors of each
level, and ``model`` adds intervals.
"""
