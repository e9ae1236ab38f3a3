-- One row where the newest run of all transactions is too old, or there is none.
select max(began_at) as newest
from {{ source('txbroker_audit', 'runs') }}
where mode in ('full', 'incremental')
having max(began_at) is null
  or max(began_at) < {{ dbt.dateadd('hour', -(var('audit_hours') | int), dbt.current_timestamp()) }}
