"""Models and data to try Penstock on, none of which has to be downloaded."""
