"""What Prometheus is told of the server: counting, and the endpoint that shows it.

Nothing in here exists unless the operator asks for metrics. What is counted belongs to one event
loop; so does the endpoint, which therefore needs no locks.
"""
