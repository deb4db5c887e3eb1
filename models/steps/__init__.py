"""What measured training steps teach: how far a step is from its operators and collectives alone.

``effects`` learns the factors of what a step has in common with others, level by level, and
``model`` adds intervals.
"""
