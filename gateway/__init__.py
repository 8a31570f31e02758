"""The gateway: data plane, control plane, and what joins them to the policies and the index."""
