"""Neurons inside experts that a token does not need: which they are, and the thresholds that say so."""
