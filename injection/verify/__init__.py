"""Is the injected model right? Its modules and logits against the stock model's, one stock module in memory at a time."""
