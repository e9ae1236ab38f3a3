"""Tools of the measurements: a proxy process, an HTTP load, logs filled as by an owner."""
