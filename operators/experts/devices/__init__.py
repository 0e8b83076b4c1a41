"""What the hybrid machinery runs on: streams, events, copies and launches, on CUDA, on threads and on a virtual clock."""
