"""Orders of reading that are kind to caches (Lee and Bahn) and to the disks of nodes (Yang and Cong)."""
