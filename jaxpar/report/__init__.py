"""What people read: tables and pages of a plan. Only here are units human."""
