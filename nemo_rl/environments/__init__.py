"""What answers a policy's turns and rewards them."""
