"""Arrays split over devices, and several processes that work as one."""
