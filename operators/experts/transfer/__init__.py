"""How experts get to a device: the host store, the slots they are loaded into, and the queue that loads them."""
