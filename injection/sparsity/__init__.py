"""Where the thresholds of a model come from: a file, or a calibration; and what leaving neurons out costs it."""
