"""A layer's experts on two devices at once: planned, carried out, joined, and the next layers made ready meanwhile."""
