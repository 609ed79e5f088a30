"""What `benchmarks.bundle` is made of.

lru         a cache that keeps what was used last, simulated, and its miss rates in closed form
limit       a memory limit for one process, by cgroup
pagecache   the machine's page cache under that limit, over emulated storage
reader      the program whose reads are counted there
accuracy    a small network, trained with each bundle_ratio
"""
