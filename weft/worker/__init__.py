"""The device side: carries out steps. Owns device memory, KV pools and sampling; decides nothing."""
