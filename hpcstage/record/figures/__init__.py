"""What follows from the parts: totals, times, contention, savings. Pure."""
