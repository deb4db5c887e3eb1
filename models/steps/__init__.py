"""Learns from measured training steps what they cost beyond their operators and collectives.

``effects`` learns factors by framework, chip generation, formats and cluster; ``model`` adds
intervals; ``memory`` learns peak memory by framework.
"""
