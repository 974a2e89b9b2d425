"""From an unmodified model to a graph of layers, and from that to sections which stages run.

- ``capture``: the front ends, tried in turn; ``reasons`` says why one failed, ``layer_drop`` sees past LayerDrop.
- ``grouping``: operations joined into layers.
- ``aliases``, ``inplace``: which operations share or overwrite memory, and how cutting stays safe.
- ``fidelity``: compares outputs and gradients of a capture with the model's.
- ``split``: sections of a graph, over the model's own parameters.
- ``blueprint``, ``build_replay``: models that are built without memory; building is replayed for one part at a time.
- ``randomness``: random numbers keyed by run, microbatch and layer.
"""
