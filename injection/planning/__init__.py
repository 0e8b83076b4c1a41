"""How rules meet a model's modules: which rule takes which module, and what is said where none does."""
