"""The control plane: the controller, which plans the work of the ranks, and the agents that start and kill them.

A request (`requests`: reading, drawing, keeping, losses) comes in by `intake` and waits among the `open_requests`; the
`scheduler` plans from views of them, `steps` turns a plan into orders for the ranks, `answers` takes what comes of it,
and `states` what is kept. `controller` holds these together, `group` the epochs of the ranks.
"""
