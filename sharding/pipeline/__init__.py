"""Pipeline schedules as data: tables of who computes what when, checked and simulated. No JAX."""
