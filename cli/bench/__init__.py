"""`txbroker bench`: the load, the proxy, the meters and the figures."""
