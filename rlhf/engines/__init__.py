"""What generates and what trains, behind two protocols that every engine passes the same tests for."""
