"""The broker of a proxy, its partitions and the other proxies."""
