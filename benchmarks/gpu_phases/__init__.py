"""The phases of `gpu_day.py`: each is a module with a function that returns its cases."""
