-- Critical findings that are open and not acknowledged.
select id, kind, grp, topic, opened_at, why
from {{ source('txbroker_audit', 'drift') }}
where state = 'open'
  and severity = 'critical'
  and (acknowledged_until is null or acknowledged_until < {{ dbt.current_timestamp() }})
