"""Runs as jobs of a Ray cluster: sent to it from any machine, and seen and stopped from any.

A submitted run is `flatpeak train` on the cluster's head, so it is driven like every other. What it
prints as JSON is the job's log, which is all that others need to see how it goes; nothing but Ray's
own job server, at the address of the dashboard, listens for that.
"""
