"""How every transaction ended. These rules repeat those of `txbroker.core` on purpose and import
nothing of its ledger, so that a fault in the one shows in the other."""
