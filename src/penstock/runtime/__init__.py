"""The part of Penstock that needs torch: capture, measure, split, run."""
