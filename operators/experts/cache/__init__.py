"""Which experts deserve a slot: cache policies, admission, the optimum they are held to, and traces to play them on."""
