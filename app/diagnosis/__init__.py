"""The page Diagnosis: verdict, chain, evidence, controls, fix, rules, observations."""
