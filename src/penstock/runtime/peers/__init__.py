"""What workers say to each other besides tensors: they meet, share facts, leave word for each other, agree.

- ``peers``: one worker's end of it, the same whether workers are processes or threads.
- ``store``: workers that are processes, through torch's store; how a generation of them begins and ends.
- ``threads``: workers that are threads of one process.
- ``reason``: what torch says of a failure, in short.
"""
