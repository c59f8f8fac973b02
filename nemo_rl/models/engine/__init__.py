"""The trainer. It knows mesh, model, heads, microbatches and steps; it knows no algorithm and no data plane."""
