"""Every policy on every workload: `runs` simulates, `ablation` takes the flagship apart, `tables` makes the report."""
