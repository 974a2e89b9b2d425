"""What workers say to each other besides tensors: joining, meeting, sharing facts, agreeing on a directory.

- ``meeting``: joining and leaving, and what all workers do together; an error names those who are missing.
- ``sharing``: what every worker says of itself, known to all.
- ``agreement``: the run directory that worker 0 opens for all.
- ``reason``: what torch says of a failure, in short.
"""
