"""What a plan will need and how fast it will be here, before any weight is read."""
