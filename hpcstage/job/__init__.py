"""Inside the job: which scheduler, which nodes, which local disk, how much time is left."""
