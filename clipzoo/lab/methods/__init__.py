"""The comparison lab: methods with equal search budgets on generated worlds, each winner trained with fresh seeds."""
