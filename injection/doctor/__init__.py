"""What this machine and this installation have, what is wrong with them, and how to mend it."""
