"""Kernels derived from an algorithm's own functions: PyTorch code -> graph -> numba or Triton text -> compiled code.

trace.py      torch's record of one client's loss and gradient, turned into a graph
graph.py      values over samples, and the algebra that makes them cheap
weights.py    proof that equal samples may be taken together
schedule.py   what is kept in memory, and in which pass over the samples it is made
step.py       the text of one step's gradient, for numba
driver.py     the text around it: gather, epochs, optimizers, write back; the same for every model
triton_step.py, triton_driver.py    both of these for a GPU, in Triton
pool.py       the text around it for methods that have all data in one place
cut.py        what of a function is made once, for each client, or for each row
rowwise.py    what is made row by row, where rows lie
forward.py    the text of functions without a gradient: scoring, merging
build.py      from text to compiled code, and the cache
"""
