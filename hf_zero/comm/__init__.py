"""Communication of one data-parallel group: transports, collectives, counters, the watchdog."""
