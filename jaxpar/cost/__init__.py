"""What a layout costs: time of computing and moving, bytes of memory."""
